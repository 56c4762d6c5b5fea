"""What one check found, and what becomes of it in a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from kimicap.errors import CheckError


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of one value, at the block where it is worst.

    Attributes:
        name: Of the check.
        value: Dotted name of the value.
        block: Block of the model, or None for values of the whole model.
        error: As measured; NaN or infinite where the values are.
        tolerance: Largest error that passes.
        about: What is compared, for people.
    """

    name: str
    value: str
    block: int | None
    error: float
    tolerance: float
    passed: bool
    about: str

    @staticmethod
    def of(name: str, value: str, block: int | None, error: float, tolerance: float, about: str) -> "Check":
        """A check that passes if its error is within the tolerance; NaN never is."""
        return Check(
            name=name,
            value=value,
            block=block,
            error=error,
            tolerance=tolerance,
            passed=error <= tolerance,
            about=about,
        )

    def data(self) -> dict[str, Any]:
        """As JSON values; an error that is no number becomes null."""
        return {**vars(self), "error": self.error if isfinite(self.error) else None}


def refuse_constant(checks: Iterable[Check]) -> None:
    """Stops a run in which an array holds one value only.

    Raises:
        CheckError: One does.
    """
    for check in checks:
        if check.name == "varied" and not check.passed:
            where = "" if check.block is None else f" of block {check.block}"
            raise CheckError(
                f"{check.value}{where} holds one value only in the first batch ({check.about}), so it is not what the "
                "model computes; look into it with kimicap check, and mend the model or the schema."
            )


def merged(blocks: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The checks in the records of a capture's blocks, each at its worst, as JSON values."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for record in blocks.values():
        for check in record.get("checks", ()):
            place = check["name"], check["value"]
            known = worst.get(place)
            if known is None or (check["passed"], -_number(check)) < (known["passed"], -_number(known)):
                worst[place] = check
    return list(worst.values())


def _number(check: Mapping[str, Any]) -> float:
    return inf if check["error"] is None else float(check["error"])
