"""Engines over the tiny golden models, a tiny model that has a tokenizer, and executors that tests can steer."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy import Engine
from miro_cy.batch import BatchView
from miro_cy.requests import Event
from miro_cy.text.bytelevel import BYTES

TESTS = Path(__file__).parents[1]
BUILD = runpy.run_path(str(TESTS / "gguf_bytes.py"))["build_gguf"]
WORDS = ["he", "ll", "llo", "hello", "Ġw", "Ġwo"]
MERGES = ["h e", "l l", "ll o", "he llo", "Ġ w", "Ġw o"]
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
F32 = NDArray[np.float32]


class Steered:
    """An executor around another one. before(view) runs first; after(view, logits) may replace the logits."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before: Callable[[BatchView], None] = lambda view: None
        self.after: Callable[[BatchView, F32], F32] = lambda view, logits: logits
        self.views: list[list[tuple[int, int, int, int]]] = []

    def forward(self, view: BatchView) -> F32:
        self.views.append(view.rows())
        self.before(view)
        return self.after(view, self.inner.forward(view))


def put_executor(engine: Engine, executor: Any) -> None:
    """Hand the engine another executor, between steps."""
    engine._parts.core._executor = executor


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """The path of a golden model by its folder's name."""
    return lambda name: TESTS / "data" / "golden" / "hf" / name / "model-f32.gguf"


@pytest.fixture
def load() -> Iterator[Callable[..., Engine]]:
    """Engine.load for this test alone: whatever it loads is closed afterwards."""
    opened: list[Engine] = []

    def make(path: Any, **settings: Any) -> Engine:
        opened.append(Engine.load(path, **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def _llama(golden: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine.load(golden("llama"), threads=1, kv_memory="8MiB") as engine:
        yield engine


@pytest.fixture
def llama(_llama: Engine, is_whole: Callable[[Engine], bool]) -> Iterator[Engine]:
    """A shared engine that serves token ids only; each test must leave its pool whole."""
    yield _llama
    assert is_whole(_llama)


@pytest.fixture
def steer() -> Iterator[Callable[[Engine], Steered]]:
    """Puts a Steered executor into an engine, and takes it out again after the test."""
    undo: list[tuple[Engine, Any]] = []

    def wrap(engine: Engine) -> Steered:
        inner = engine._parts.core._executor
        undo.append((engine, inner))
        steered = Steered(inner)
        put_executor(engine, steered)
        return steered

    yield wrap
    for engine, inner in reversed(undo):
        put_executor(engine, inner)


@pytest.fixture(scope="session")
def is_whole() -> Callable[[Engine], bool]:
    """Whether within ten seconds nothing runs, nothing waits and every KV block is free again."""

    def check(engine: Engine) -> bool:
        deadline = time.monotonic() + 10
        while True:
            stats = engine.stats()
            idle = stats["running"] == stats["waiting"] == 0
            if idle and stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]:
                engine.check_integrity()
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)

    return check


def run_to_end(engine: Engine, max_steps: int = 2000) -> list[Event]:
    """Step until there is nothing to do, checking conservation after each; all events."""
    events = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps")


def last_events(events: Iterable[Event], *, only: bool = False) -> dict[tuple[int, int], Event]:
    """{(request, choice): its last event}; fails when one has two. only: or any before it."""
    found = {}
    for event in events:
        assert event.finish_reason is not None or not only
        if event.finish_reason is not None:
            assert (event.request_id, event.choice) not in found
            found[event.request_id, event.choice] = event
    return found


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Event]]:
    return run_to_end


@pytest.fixture(scope="session")
def ends() -> Callable[..., dict[tuple[int, int], Event]]:
    return last_events


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer with random weights and a byte-level tokenizer of 265 entries."""
    tokens = [*BYTES, *WORDS, *CONTROL]
    hidden, ffn, vocab = 32, 48, len(tokens)
    shapes = {
        "token_embd": (hidden, vocab), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,), "blk.0.ffn_gate": (hidden, ffn), "blk.0.ffn_up": (hidden, ffn),
        "blk.0.ffn_down": (ffn, hidden),
        **{f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")},
    }  # fmt: skip
    rng = np.random.default_rng(5)
    tensors, data = [], b""
    for name, shape in shapes.items():
        tensors.append((f"{name}.weight", shape, 0, len(data)))
        weights = rng.standard_normal(int(np.prod(shape))).astype(np.float32) / np.sqrt(np.float32(hidden))
        data += weights.tobytes()
        data += bytes(-len(data) % 32)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 256,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [("i32", 3 if token in CONTROL else 1) for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    path = tmp_path_factory.mktemp("model") / "tiny-text.gguf"
    path.write_bytes(BUILD(metadata, tensors, data))
    return path


class Speaker:
    """Makes an engine say a given answer: its executor always favours the answer's next token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompt = "he"
        self.n_prompt = len(engine.tokenize(self.prompt))
        self.answer: list[int] = []
        put_executor(engine, self)

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        (token,) = self.engine.tokenizer.encode(text)
        return token

    def say(self, answer: str | Sequence[int]) -> list[int]:
        self.answer = self.engine.tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        return self.answer

    def forward(self, view: BatchView) -> F32:
        logits = np.zeros((view.n_logits, self.engine.vocab_size), np.float32)
        at = 0
        for _, first, n_tok, n_log in view.rows():
            for position in range(first + n_tok - n_log, first + n_tok):
                index = position + 1 - self.n_prompt
                if 0 <= index < len(self.answer):
                    logits[at, self.answer[index]] = 30.0
                at += 1
        return logits


@pytest.fixture
def speaker(load: Callable[..., Engine], text_model: Path) -> Speaker:
    return Speaker(load(text_model, threads=1))
