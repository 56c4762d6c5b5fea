"""The README's table of values, made from the schema: ``python -m tests.readme`` writes it."""

from pathlib import Path

from kimicap.schema import load_schema

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- values: written by `python -m tests.readme` -->\n", "<!-- end of values -->"


def table() -> str:
    """A row a value, by host."""
    lines = ["| host | value | layout | what it is |", "|---|---|---|---|"]
    for value in load_schema().values.values():
        lines.append(f"| `{value.host}` | `{value.name}` | {', '.join(value.layout)} | {value.about} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replaces the table between the two marks."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
