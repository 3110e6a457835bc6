"""``python -m smg``."""

from smg.cli import main

if __name__ == "__main__":
    main()
