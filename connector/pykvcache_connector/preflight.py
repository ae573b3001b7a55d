"""Whether the vLLM and the Python of this image can have the cache, asked before vLLM depends on it.

Syntax of Python 3.8, see `plugin`. The connector's modules are imported, which starts nothing; vLLM would do so too.
"""

from __future__ import annotations

import importlib
import platform
import sys

from pykvcache_contract.names import CONNECTOR_MODULE, SPEC_MODULE

PYTHON_MIN = (3, 10)
VLLM_RANGE = "0.22 to 0.33"
OUR_PREFIX = "pykvcache_"


def why_unfit() -> str:
    """Return why this image cannot have the cache and what to change; empty if it can."""
    if sys.version_info[:2] < PYTHON_MIN:
        return "{}: it needs Python {}.{} or later. Use an image with vLLM {}".format(image(), *PYTHON_MIN, VLLM_RANGE)
    for module in (CONNECTOR_MODULE, SPEC_MODULE):
        try:
            importlib.import_module(module)
        except Exception as error:  # an older or newer vLLM may fail in any way
            return f"{image()}: {explain(error)}"
    return ""


def image() -> str:
    """Return which vLLM and which Python this is."""
    version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
    return f"this image has vLLM {version} with Python {platform.python_version()}"


def explain(error: Exception) -> str:
    """Return what an import that failed means, and what to do about it."""
    missing = str(getattr(error, "name", None) or "").split(".")[0]
    if missing.startswith(OUR_PREFIX) or type(error) is SyntaxError:
        return f"the library is not complete ({error}). Delete the pod, so that it is copied anew"
    if isinstance(error, ModuleNotFoundError) and missing and missing != "vllm":
        return f"it lacks the package {missing}, which py-kvcache needs. Install it in the image"
    if missing == "vllm" or isinstance(error, (ImportError, AttributeError, TypeError)):
        return f"its interfaces are others ({error}). py-kvcache knows vLLM {VLLM_RANGE}: use one of them"
    return f"the cache cannot be loaded ({type(error).__name__}: {error}). Please report it"
