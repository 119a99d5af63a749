"""`python -m minirl`: see minirl.cli."""

import sys

from minirl.cli import main

sys.exit(main())
