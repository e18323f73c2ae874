"""Serves a model until SIGTERM, then prints the engine's last stats.

serve.py MODEL ENDPOINT ENGINE_SETTINGS WORKER_LIMITS, the last two in JSON.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys

from miro_cy import Engine
from miro_worker import Worker, WorkerConfig


def main() -> int:
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level="WARNING")
    model, endpoint, engine_settings, limits = sys.argv[1:]
    with Engine.load(model, **json.loads(engine_settings)) as engine:
        worker = Worker(engine, endpoint, config=WorkerConfig(**json.loads(limits)))
        code = worker.run(lambda: print("ready", flush=True))
        engine.check_integrity()
        print(json.dumps(engine.stats()), flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
