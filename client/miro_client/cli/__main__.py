"""`python -m miro_client.cli` is `miro`."""

from miro_client.cli import main

main(prog_name="miro")
