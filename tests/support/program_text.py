"""``python -c TEXT ARGS`` as a module, so that `tests.support.forked_start` can fork it."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1))
