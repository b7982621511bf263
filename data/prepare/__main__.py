"""python -m data.prepare: see `command.py`."""

from data.prepare.command import main

if __name__ == "__main__":
    main()
