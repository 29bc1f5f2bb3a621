"""Set before any library reads it: nothing in the tests may reach the network, and as some start
several processes, each has one thread, which sleeps while it waits."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
