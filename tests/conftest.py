"""Nothing in the tests may reach the network: set before any library reads it."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
