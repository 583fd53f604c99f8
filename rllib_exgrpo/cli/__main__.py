"""Makes `python -m rllib_exgrpo.cli` the `rllib` command."""

import sys

from rllib_exgrpo.cli import main

sys.exit(main())
