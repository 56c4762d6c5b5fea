"""``python -m kimicap``, which torchrun needs."""

from kimicap.cli import main

main()
