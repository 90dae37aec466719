"""`python -m fedhm` is the command line."""

import sys

from fedhm.cli import main

sys.exit(main())
