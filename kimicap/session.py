"""A loaded model with its hooks: a probe before anything is written, then the capture of some blocks."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kimicap.cluster import Rank
from kimicap.config import Settings
from kimicap.events import Event
from kimicap.first_batch import FirstBatch
from kimicap.forwards import Decoding, Runner
from kimicap.hooks import Recorder
from kimicap.invariants import router_rule
from kimicap.pipeline import Loop, Work
from kimicap.plan import slot_memory
from kimicap.prepare import Prepared, on_existing
from kimicap.reading import refuse_missing
from kimicap.slots import Slots
from kimicap.store import Store

PROBE_TOKENS = 4


@contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop`` inside; a second one acts as it would without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        stop()

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """One model and what is wanted of it.

    Args:
        prepared: The plan.
        model: The loaded model.
        slots: Host memory to use, and to leave as it is; without, each capture takes its own.
    """

    def __init__(self, prepared: Prepared, model: torch.nn.Module, slots: Slots | None = None) -> None:
        self._prepared, self._model = prepared, model
        self._slots = slots
        self._fast = prepared.settings.states == "fast"

    def probe(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """A few tokens through the hooks, so that a site that does not fit fails before anything is written.

        Returns:
            The functions that ran at each call site, and the dtype in which the model had each value.

        Raises:
            UsageError: A site does not fit the model.
        """
        recorder = Recorder(
            self._model, self._prepared.architecture, self._prepared.wants, lambda *_: None, fast=self._fast
        )
        runner, tokens = self._runner(recorder), [self._prepared.sequences.tokens(0)[:PROBE_TOKENS]]
        decoding = decoding_of(self._prepared.settings, self._model)
        with recorder.attached():
            runner.prompts(tokens)
            refuse_missing(recorder.missing())
            if decoding is not None:
                recorder.fired.clear()
                runner.decode(tokens, [0], replace(decoding, tokens=1, forced=False))
                refuse_missing(recorder.missing())
        return {**recorder.kernels, **self._experts()}, recorder.dtypes

    def _experts(self) -> dict[str, str]:
        """The experts implementation of transformers' own mixtures; models with their own code have none."""
        config = self._model.get_submodule(self._prepared.architecture.match.inside).config
        found = getattr(config, "_experts_implementation", None)
        return {} if found is None else {"experts": str(found)}

    def capture(self, store: Store, blocks: Sequence[int], *, rank: Rank, checked: bool = True) -> Iterator[Event]:
        """Captures blocks into a store.

        Args:
            store: The capture.
            blocks: Numbers of the blocks to do.
            rank: Who does them.
            checked: Whether the first batch is checked, which a benchmark of the batches after it leaves out.

        Raises:
            KimicapError: See `Loop.run`.
        """
        prepared, settings = on_existing(self._prepared, store.layouts), self._prepared.settings
        on_gpu = any(parameter.device.type == "cuda" for parameter in self._model.parameters())
        slots = self._slots or Slots(slot_memory(settings), pinned=on_gpu)
        loop = Loop(
            plan=prepared.plan,
            store=store,
            sequences=prepared.sequences,
            work=Work(
                group=prepared.group,
                may_split=prepared.may_split,
                batch_tokens=settings.batch_tokens,
                batch_size=settings.batch_size,
                rank=rank.rank,
            ),
            slots=slots,
            decoding=decoding_of(settings, self._model),
            continued=settings.split_long == "continue",
            first=self._first_batch() if checked else None,
        )
        recorder = Recorder(
            self._model, prepared.architecture, prepared.wants, loop.sink, fast=self._fast, together=True
        )
        try:
            with signals(loop.stop):
                yield from loop.run(self._runner(recorder), recorder, blocks)
        finally:
            if self._slots is None:
                slots.close()

    def _first_batch(self) -> FirstBatch:
        architecture = self._prepared.architecture
        return FirstBatch(architecture, self._prepared.wants, router_rule(self._model, architecture))

    def _runner(self, recorder: Recorder) -> Runner:
        return Runner(self._model, self._prepared.architecture, recorder, head=self._prepared.needs_head)


def decoding_of(settings: Settings, model: torch.nn.Module) -> Decoding | None:
    """How tokens are decoded after each prompt, or None."""
    if not settings.generate:
        return None
    return Decoding(
        tokens=settings.generate,
        forced=settings.forced,
        temperature=settings.temperature,
        seed=settings.seed,
        stop=_stop_tokens(model),
    )


def _stop_tokens(model: Any) -> tuple[int, ...]:
    """Token ids that end a sequence, by the model's generation config."""
    found = model.generation_config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)
