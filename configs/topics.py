"""Writes build/topics.jsonl, a small English text that every Python has: the pages behind ``help()``, one a row."""

import json
from pathlib import Path
from pydoc_data.topics import topics

target = Path(__file__).resolve().parents[1] / "build" / "topics.jsonl"
target.parent.mkdir(exist_ok=True)
target.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)), encoding="utf-8")
