"""``python -m rocm_dp`` is ``rocm-dp``."""

import sys

from rocm_dp.cli import main

sys.exit(main())
