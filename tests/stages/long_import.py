"""A module as large as torch on a busy machine; workers import it in tests/stages/test_workers.py."""

import time

time.sleep(600)
