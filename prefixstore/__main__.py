"""``python -m prefixstore`` is ``prefixstore``."""

import sys

from prefixstore.cli import main

sys.exit(main())
