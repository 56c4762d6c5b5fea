"""One batch through the model: whole prompts, or prompts and then decoded tokens, with every row's place known."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kimicap.architecture import Architecture
from kimicap.errors import CheckError, RoomError
from kimicap.hooks import Recorder
from kimicap.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens after the prompt are chosen.

    Attributes:
        tokens: How many.
        forced: They are the last ones given, rather than chosen.
        temperature: 0 takes the likeliest.
        seed: Seed of sampling; each sequence draws from a stream of its own, so its batch does not matter.
        stop: Token ids that end a sequence.
    """

    tokens: int
    forced: bool
    temperature: float
    seed: int
    stop: tuple[int, ...]


class Runner:
    """Runs batches through a model, telling the recorder where each row's tokens are.

    Args:
        model: The loaded model.
        architecture: Its family and sizes.
        recorder: Its hooks.
        head: Whether a value of the head is wanted; without, the head is left out.
    """

    def __init__(self, model: torch.nn.Module, architecture: Architecture, recorder: Recorder, *, head: bool) -> None:
        model = model.get_submodule(architecture.match.inside)
        self._model, self._recorder = model, recorder
        self._trunk = model if head else model.get_submodule(architecture.family.trunk)
        self._device = _input_device(model)
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.2x renamed the argument; both are never there at once.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def prompts(self, tokens: Sequence[np.ndarray]) -> None:
        """Whole prompts, padded on the right and without a mask.

        Every part of the model is causal, so no real token ever sees the padding, and each row's values are
        those of the row alone; what the padding does reach, the final states, is recomputed without it.
        """
        lengths = [len(row) for row in tokens]
        ids = np.zeros((len(tokens), max(lengths)), np.int64)
        for row, given in enumerate(tokens):
            ids[row, : len(given)] = given
        self._recorder.rows = Rows.of_prompts(lengths)
        self._forward(self._trunk, ids)

    def continued(self, tokens: np.ndarray, cache: Any, *, capture: bool = True) -> Any:
        """One sequence that goes on from a cache (None: from nothing); returns the cache after it."""
        self._recorder.rows = Rows.of_prompts([len(tokens)])
        with self._recorder.paused(not capture):
            output = self._forward(self._trunk, tokens[None].astype(np.int64), use_cache=True, cache=cache)
        return output[self._cache_name]

    def decode(self, tokens: Sequence[np.ndarray], numbers: Sequence[int], decoding: Decoding) -> list[np.ndarray]:
        """Prompts, then ``decoding.tokens`` more through the model's cache; the last one is fed back too.

        Prompts are padded on the left, where the mixers zero the padding and the attention masks it.

        Returns:
            Every row's tokens, decoded ones included.
        """
        held = decoding.tokens if decoding.forced else 0
        prompts = [row[: len(row) - held] for row in tokens]
        lengths = [len(row) for row in prompts]
        width = max(lengths)
        ids = np.zeros((len(prompts), width), np.int64)
        mask = np.zeros((len(prompts), width), np.int64)
        for row, given in enumerate(prompts):
            ids[row, width - len(given) :] = given
            mask[row, width - len(given) :] = 1
        self._recorder.rows = Rows.of_prompts(lengths, left=True)
        output = self._forward(self._model, ids, mask=mask, use_cache=True)
        streams = [torch.Generator().manual_seed(decoding.seed * 1_000_003 + number) for number in numbers]
        rows, alive = [list(row) for row in prompts], [True] * len(prompts)
        for step in range(decoding.tokens):
            if not any(alive):
                break
            if decoding.forced:
                chosen = [int(row[length + step]) for row, length in zip(tokens, lengths, strict=True)]
            else:
                chosen = _choose(output["logits"][:, -1], streams, decoding.temperature)
            for row, token in enumerate(chosen):
                if alive[row]:
                    rows[row].append(token)
            mask = np.concatenate([mask, np.ones((len(rows), 1), np.int64)], 1)
            self._recorder.rows = Rows(
                width_tokens=1,
                starts=(0,) * len(rows),
                counts=tuple(int(live) for live in alive),
                past=tuple(length + step for length in lengths),
                first=False,
            )
            output = self._forward(
                self._model,
                np.asarray(chosen, np.int64)[:, None],
                mask=mask,
                use_cache=True,
                cache=output[self._cache_name],
            )
            if not decoding.forced:
                alive = [live and token not in decoding.stop for live, token in zip(alive, chosen, strict=True)]
        return [np.asarray(row, np.int32) for row in rows]

    def _forward(
        self,
        module: torch.nn.Module,
        ids: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        use_cache: bool = False,
        cache: Any = None,
    ) -> Any:
        arguments: dict[str, Any] = {"input_ids": torch.from_numpy(ids).to(self._device), "use_cache": use_cache}
        if mask is not None:
            arguments["attention_mask"] = torch.from_numpy(mask).to(self._device)
        if cache is not None:
            arguments[self._cache_name] = cache
        with torch.inference_mode():
            return _within_memory(module)(**arguments)


def _input_device(model: torch.nn.Module) -> torch.device:
    """Where the model takes its token ids: its first weights' device, or where accelerate brings offloaded ones."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    devices = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in model.modules())
    return next(torch.device(found) for found in devices if found is not None)


def _within_memory(module: torch.nn.Module) -> Callable[..., Any]:
    def run(**arguments: Any) -> Any:
        try:
            return module(**arguments)
        except torch.OutOfMemoryError:
            raise RoomError(
                "The device's memory does not hold this batch; give a smaller --batch-tokens and go on with --resume."
            ) from None

    return run


def _choose(logits: torch.Tensor, streams: Sequence[torch.Generator], temperature: float) -> list[int]:
    """The next token of each row of ``[batch, vocab]`` logits."""
    if temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    probabilities = (logits.float() / temperature).softmax(-1).cpu()
    if not probabilities.isfinite().all():
        raise CheckError(
            "The model's logits are NaN or infinite, so no token can be sampled from them; look into it with kimicap "
            "check, or decode given tokens with --forced."
        )
    return [
        int(torch.multinomial(row, 1, generator=stream)) for row, stream in zip(probabilities, streams, strict=True)
    ]
