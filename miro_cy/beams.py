"""The beams of one request as sequences of the scheduler: how a beam search goes on in blocks of KV cache.

    a step's rows        -> take: a row for each live beam, in whatever step it comes
    the last one is here -> advance: the parent's sequence takes its first child's token, other children are forks of
                            it, who has no child ends
    no step can be made  -> give_up: a beam that only waits for others leaves its blocks to them

All beams of a request advance together, so one that was preempted is waited for. The others have their rows, and hold
their blocks only in order not to compute them again: they never keep another sequence from running for ever. A beam
that gave its blocks up has no sequence; its children join the family as new ones and are computed from the start, or
from what the prefix index still has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miro_cy.errors import NonFinite
from miro_cy.live import Choice, Live, Outcome, Rows, Told
from miro_cy.requests import Event, FinishReason, Usage
from miro_cy.sampling.beam import BeamSearch, Hypothesis, Move, Row
from miro_cy.sampling.params import SamplingParams
from miro_cy.sampling.sampler import top_logprobs
from miro_cy.text import Tokenizer

F32 = NDArray[np.float32]


class Sequences(Protocol):
    """What of a scheduler is needed here; see there."""

    def has_computed(self, seq: int) -> bool: ...
    def resume(self, seq: int, token: int) -> None: ...
    def fork(self, seq: int, token: int) -> int: ...
    def join(self, seq: int, tokens: NDArray[np.int32]) -> int: ...
    def finish(self, seq: int) -> None: ...


class Beams:
    """A beam search, the prompt it began with, and which sequence each live beam has.

    seqs: all sequences, at least one; when the search is done they are for others to end.
    """

    def __init__(self, search: BeamSearch, prompt: NDArray[np.int32], seq: int, sequences: Sequences) -> None:
        self.seqs = [seq]
        self._search = search
        self._prompt = prompt
        self._sequences = sequences
        self._seq_of: list[int | None] = [seq]  # by live beam; None: it gave up its blocks, and its row is here
        self._rows: list[Row | None] = [None]

    def take(self, seq: int, row: Row) -> None:
        """The most likely next tokens (BeamSearch.row_size) of a beam; the same again when it was computed again."""
        self._rows[self._seq_of.index(seq)] = row

    @property
    def is_ready(self) -> bool:
        """Whether the rows of all live beams are here."""
        return all(row is not None for row in self._rows)

    def advance(self) -> None:
        """Go on by one token, between two steps, once it is ready."""
        moves = self._search.advance([row for row in self._rows if row is not None])
        if moves:
            self._seq_of = self._move(moves)
            self._rows = [None] * len(moves)

    def give_up(self) -> int | None:
        """End the sequence of a beam that waits for others; its id, None when there is no such beam."""
        if not self.is_ready:
            for at in reversed(range(len(self._seq_of))):
                seq = self._seq_of[at]
                if seq is not None and self._rows[at] is not None:
                    self._finish(seq)
                    self._seq_of[at] = None
                    return seq
        return None

    def _move(self, moves: list[Move]) -> list[int | None]:
        """The sequences of the next live beams; those of the present ones that are not among them end."""
        parents = {at for at, _ in moves}
        # Who was preempted after its row had come has to be computed again in any case: its children take its place.
        going = {
            at: seq
            for at, seq in enumerate(self._seq_of)
            if at in parents and seq is not None and self._sequences.has_computed(seq)
        }
        leaving = [seq for seq in self.seqs if seq not in going.values()]
        # Others can join a family only while it has somebody.
        last = None if going else leaving.pop()
        for seq in leaving:
            self._finish(seq)
        beams: list[int | None] = [None] * len(moves)
        for index, (at, token) in enumerate(moves):
            if at in going and going[at] not in beams:
                self._sequences.resume(going[at], token)
                beams[index] = going[at]
            elif at in going:
                beams[index] = self._begin(self._sequences.fork(going[at], token))
        for index, (at, _) in enumerate(moves):
            if at not in going:
                tokens = np.concatenate([self._prompt, np.array(self._search.tokens(index), np.int32)])
                beams[index] = self._begin(self._sequences.join(self.seqs[0], tokens))
                if last is not None:
                    self._finish(last)
                    last = None
        return beams

    def _begin(self, seq: int) -> int:
        self.seqs.append(seq)
        return seq

    def _finish(self, seq: int) -> None:
        self._sequences.finish(seq)
        self.seqs.remove(seq)


class Beamed(Live):
    """A beam search. Its choices are the best hypotheses, best first; nothing is told of them before it is over.

    When it is cancelled, or its deadline comes, they are the best so far, beams included that would have gone on.
    """

    def __init__(
        self,
        request_id: int,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        max_new: int,
        tokenizer: Tokenizer,
        sequences: Sequences,
    ) -> None:
        super().__init__(request_id, [Choice(i, Usage(prompt_tokens=len(prompt))) for i in range(params.n_choices)])
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._sequences = sequences
        self._stop_ids = params.stop_token_ids
        self._search = BeamSearch(
            params.beam_width,
            max_new,
            {*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos_ids)},
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            n_logprobs=params.logprobs,
        )
        self._found: list[Hypothesis] = []

    def begin(self, seq: int) -> None:
        self._beams = Beams(self._search, self._prompt, seq, self._sequences)
        self._carry()

    def _carry(self) -> None:
        """The first sequence carries all choices, whichever beam it is."""
        lead, *self.others = self._beams.seqs
        self.carried = {lead: [*self.choices]}

    def take(self, rows: list[Rows], logits: F32, out: Outcome) -> list[Told]:
        for seq, _, last, position in rows:
            row = top_logprobs(logits, last - 1, self._search.row_size)
            if row is None:
                error = NonFinite(f"the model gave no finite logits at position {position}")
                told = self._tell("error")
                for item in told:
                    item.event.error = error
                return told
            self._beams.take(seq, row)
        if self._beams.is_ready:
            out.ready.append(self)
        return []

    def go_on(self) -> list[Told]:
        try:
            self._beams.advance()
        finally:
            self._carry()
        return self._tell() if self._search.done else []

    def give_up(self) -> int | None:
        seq = self._beams.give_up()
        self._carry()
        return seq

    def _tell(self, reason: FinishReason | None = None) -> list[Told]:
        (lead,) = self.carried
        return [Told(lead, choice, self.event(choice, reason)) for choice in self.choices]

    def event(self, choice: Choice, reason: FinishReason | None = None) -> Event:
        """The only event of a choice. reason: why the search ended if it was not by itself."""
        if reason == "error":
            return super().event(choice, reason)
        if not self._found:
            self._search.interrupt()
            self._found = self._search.hypotheses()
        if choice.index >= len(self._found):
            return super().event(choice, reason or "length")
        found = self._found[choice.index]
        event = super().event(choice, reason or found.finish_reason)
        event.tokens, event.score, event.logprobs = found.tokens, found.score, found.logprobs
        stream, body = self._tokenizer.stream(()), [*found.tokens]
        if found.finish_reason == "stop":
            last = body.pop()
            event.stop = last if reason is None and last in self._stop_ids else None
        event.text = "".join([stream.push(token)[0] for token in body]) + stream.finish()
        choice.usage.completion_tokens = len(found.tokens)
        return event
