"""What is not finite in a shard.

One reduction a piece tells whether anything is, on the piece's own device and waited for by nobody. Only where it
says so are elements counted, on the host, where they are by then.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch


def odd_elements(tensor: torch.Tensor, layout: Sequence[str]) -> torch.Tensor:
    """True at NaN and infinity, but for what a row of a value may be.

    That is minus infinity at masked keys; and NaN at sources to come, which all tokens lack, but never the last source,
    the running sum.
    """
    odd = ~torch.isfinite(tensor)
    if "key" in layout:
        return odd & (tensor != -torch.inf)
    if layout and layout[-1] == "source":
        lacking = tensor.isnan().all(0, keepdim=True)
        lacking[..., -1:] = False
        return odd & ~lacking
    return odd


class Odd:
    """Where a shard has elements of its own, and what is known of them.

    Args:
        layout: Names of the row's dimensions.
        layers: Blocks of the model in the shard.
        sequences: Sequences in it.
    """

    def __init__(self, layout: Sequence[str], *, layers: int, sequences: int) -> None:
        self._layout = layout
        self._ends = np.zeros((layers, sequences, len(layout)), np.int32)
        self._signs: dict[tuple[int, str], torch.Tensor] = {}
        self._gathered: dict[torch.device, tuple[list[tuple[int, str]], torch.Tensor]] = {}
        self._sent: dict[torch.device, torch.Tensor] = {}

    def see(
        self, layer: int, sequences: slice, begins: Sequence[int], tensor: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """Takes note of a piece, on the current stream.

        Args:
            layer: Which block of the shard's.
            sequences: Which sequences of the shard's.
            begins: Where on each axis of the row the piece begins.
            tensor: ``[sequence, *row]``, as the model had it.
            stored: The same in the array's dtype.
        """
        if not tensor.is_floating_point():
            return
        ends = self._ends[layer, sequences]
        np.maximum(ends, np.add(begins, tensor.shape[1:]), out=ends)
        if "key" in self._layout:
            sign = tensor.amax()  # NaN and infinity prevail, minus infinity does not
        else:
            sign = tensor.sum(dtype=torch.float32)
        self._add(layer, "nonfinite", sign)
        if stored.dtype == torch.float16:
            self._add(layer, "overflow", (torch.isfinite(tensor) & torch.isinf(stored)).sum())

    @property
    def devices(self) -> Iterable[torch.device]:
        """Where what was gathered is."""
        return self._gathered.keys()

    def gather(self) -> None:
        """Brings together what is known, on the current streams; no piece may come any more."""
        by_device: dict[torch.device, list[tuple[int, str]]] = {}
        for name, sign in self._signs.items():
            by_device.setdefault(sign.device, []).append(name)
        for device, names in by_device.items():
            self._gathered[device] = names, torch.stack([self._signs[name].float() for name in names])
        self._signs.clear()

    def send(self, device: torch.device) -> None:
        """Starts the copy to the host of what was gathered on a GPU, on the current stream."""
        self._sent[device] = self._gathered[device][1].to("cpu", non_blocking=True)

    def count(self, data: torch.Tensor) -> Iterator[tuple[int, str, int]]:
        """Counts, once what was gathered on a GPU is there.

        Args:
            data: The shard, ``[layer, sequence, *row]``, on the host.

        Yields:
            A block of the shard's, ``nonfinite`` or ``overflow``, and how many elements are.
        """
        for device, (names, signs) in self._gathered.items():
            for (layer, kind), sign in zip(names, self._sent.get(device, signs).tolist(), strict=True):
                if kind == "overflow":
                    number = int(sign)
                else:
                    number = 0 if np.isfinite(sign) else self._count_layer(layer, data[layer])
                if number:
                    yield layer, kind, number

    def _count_layer(self, layer: int, data: torch.Tensor) -> int:
        rows = (row[tuple(map(slice, ends))] for row, ends in zip(data, self._ends[layer], strict=True))
        return sum(int(odd_elements(row, self._layout).sum()) for row in rows)

    def _add(self, layer: int, kind: str, sign: torch.Tensor) -> None:
        before = self._signs.get((layer, kind))
        self._signs[layer, kind] = sign if before is None else before + sign
