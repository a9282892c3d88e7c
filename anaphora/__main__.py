"""`python -m anaphora`: the command line, where its script is not on the path."""

from __future__ import annotations

import sys

from anaphora.cli.main import main

sys.exit(main())
