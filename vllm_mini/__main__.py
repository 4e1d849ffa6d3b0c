"""`python -m vllm_mini` is `vllm-mini`."""

import sys

from vllm_mini.cli import main

if __name__ == "__main__":
    sys.exit(main())
