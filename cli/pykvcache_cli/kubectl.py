"""What is asked of a cluster through the user's own kubectl, with its contexts, plugins for logging in, and rights."""

import subprocess

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.names import API_GROUP, POOL_PLURAL

PROGRAM = "kubectl pykvcache"
"""What the command line calls itself when kubectl runs it."""
_LIMIT_SECONDS = 60


def pool_manifest(name: str) -> str:
    """Return a pool of the current context's cluster as JSON.

    Raises:
        ConfigurationError: kubectl is missing, or says no; with its words.
    """
    # Behind `--`: the name is a label's value in a manifest, and `--server=…` would send credentials to somebody.
    command = ["kubectl", "get", "--output=json", f"{POOL_PLURAL}.{API_GROUP}", "--", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{' '.join(command)}: {error}. Give the pool's manifest by --pool-file") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        reason = lines[-1]  # before it: retries
        raise ConfigurationError(f"{' '.join(command)}: {reason}. Give the pool's manifest by --pool-file")
    return done.stdout
