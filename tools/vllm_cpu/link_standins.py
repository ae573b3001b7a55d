"""Let a CUDA build of torch import on a machine without CUDA: build stand-ins for the libraries it links to.

Facts: PyPI carries torch only as a CUDA build. Its shared objects name about fifteen CUDA libraries (4 GB of wheels)
and the loader refuses to start without every one of them, with every symbol in the version that was linked.
What they mean for us: nothing on a CPU ever calls them, with two exceptions that run while torch loads, libcudart and
libcupti, which therefore must be the real ones (nvidia-cuda-runtime and nvidia-cuda-cupti, 51 MB).
Therefore: for each other missing library, one small C file with each wanted symbol as a function that returns an error,
compiled with the wanted symbol versions. Nothing here is CUDA and nothing works as CUDA.

Usage: link_standins.py SITE_PACKAGES          needs gcc and readelf; prints what it made
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv)[A-Za-z_]*\.so(\.\d+)*")
CUDA_SYMBOL = re.compile(r"(cu[A-Z]|cufile|cuFile|cusparseLt|nccl|nvml|nvrtc|nvshmem)")

# Lines of `readelf --wide --dynamic --version-info --dyn-syms`.
NEEDED = re.compile(r"\(NEEDED\)\s+Shared library: \[(\S+)\]")
VERSIONS_OF_FILE = re.compile(r"Version: \d+\s+File: (\S+)\s+Cnt:")
VERSION_NAME = re.compile(r"^\s+(?:0x|0)[0-9a-f]+:\s+Name: (\S+)\s+Flags:")
UNDEFINED_SYMBOL = re.compile(r"\bUND (\w+)(?:@{1,2}(\S+))?")


@dataclass
class Wanted:
    """What the shared objects of torch ask of libraries that are not their own."""

    libraries: set[str] = field(default_factory=set)
    library_of_version: dict[str, str] = field(default_factory=dict)
    symbols_of_version: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unversioned_symbols: set[str] = field(default_factory=set)


def read_wanted(shared_object: Path, wanted: Wanted) -> None:
    """Add the needs of one shared object to `wanted`."""
    command = ["readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(shared_object)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    file_of_versions = ""
    for line in listing.splitlines():
        if match := NEEDED.search(line):
            if CUDA_LIBRARY.fullmatch(match[1]):
                wanted.libraries.add(match[1])
        elif match := VERSIONS_OF_FILE.search(line):
            file_of_versions = match[1]
        elif (match := VERSION_NAME.search(line)) and CUDA_LIBRARY.fullmatch(file_of_versions):
            wanted.library_of_version[match[1]] = file_of_versions
        elif match := UNDEFINED_SYMBOL.search(line):
            symbol, version = match[1], match[2]
            if version:
                wanted.symbols_of_version[version].add(symbol)
            elif CUDA_SYMBOL.match(symbol):
                wanted.unversioned_symbols.add(symbol)


def build_standin(target: Path, symbols_of_version: dict[str, set[str]], unversioned_symbols: set[str]) -> None:
    """Compile one stand-in; a library of which torch names no symbol becomes an empty one."""
    symbols = sorted(unversioned_symbols.union(*symbols_of_version.values()))
    source = "".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in symbols)
    script = "".join(
        f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(names)) or 'none_;'} }};\n"
        for version, names in sorted(symbols_of_version.items())
    )
    with tempfile.TemporaryDirectory() as scratch:
        source_path, script_path = Path(scratch, "standin.c"), Path(scratch, "standin.map")
        source_path.write_text(source)
        script_path.write_text(script)
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-z", "noexecstack"]
        command += [f"-Wl,-soname,{target.name}", "-o", str(target), str(source_path)]
        if script:
            command.append(f"-Wl,--version-script={script_path}")
        subprocess.run(command, check=True)


def main(site_packages: Path) -> None:
    """Make every stand-in that is missing from torch's library folder."""
    torch_libraries = site_packages / "torch" / "lib"
    wanted = Wanted()
    for shared_object in sorted(torch_libraries.glob("*.so*")):
        read_wanted(shared_object, wanted)
    present = {path.name for folder in (torch_libraries, site_packages / "nvidia") for path in folder.rglob("*.so*")}
    missing = sorted(wanted.libraries - present)
    for name in missing:
        versions = [version for version, library in wanted.library_of_version.items() if library == name]
        # The loader finds a symbol without a version in any library, so one stand-in may carry all of them.
        unversioned = wanted.unversioned_symbols if name == missing[0] else set()
        build_standin(torch_libraries / name, {v: wanted.symbols_of_version[v] for v in versions}, unversioned)
    print(f"made {len(missing)} stand-ins for CUDA libraries: {' '.join(missing) or 'all were there'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
