"""A worker under load over its socket, alone or beside llama.cpp's server.

prompts.py   texts of random words, as token ids
worker.py    a miro-worker in a process of its own
systems.py   what both systems look like to a load, and miro's
llama.py     llama-server, over HTTP
works.py     the loads, and what is measured of each
report.py    rounds, the table, JSON
"""
