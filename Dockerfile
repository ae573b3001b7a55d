# The images of py-kvcache, one for each --target: operator, sidecar (also the node agent), connector, bench.
#
#   docker build --target sidecar -t pykvcache-sidecar .
#
# Libraries lie in one layer, our code in a small one above it: after a change of the code only that is made anew.
# Buildah builds it too; its 1.28 loses files in `RUN --mount=type=cache`, so there is none. PATH decides which Python:
# the official image has it in /usr/local/bin, Debian in /usr/bin.

ARG BASE=docker.io/library/python:3.11-slim-bookworm

# ---- a wheel without code, for its requirements: made of what it depends on, not of the settings of our tools
FROM ${BASE} AS project
WORKDIR /project
COPY pyproject.toml /
RUN awk '/^\[/ { keep = !/^\[+tool\./ || /^\[tool\.hatch/ } keep' /pyproject.toml > pyproject.toml \
    && touch README.md LICENSE

FROM ${BASE} AS pip
RUN python3 -m venv /pip && /pip/bin/pip install --quiet hatchling && python3 -m venv --without-pip /opt/pykvcache
COPY --from=project /project /project
RUN /pip/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir /requirements /project

# Without the libraries' own tests, a tenth of what they weigh.
FROM pip AS operator-libraries
RUN /pip/bin/pip --python /opt/pykvcache/bin/python install --quiet "$(ls /requirements/*.whl)[operator]" \
    && find /opt/pykvcache -type d -name tests -prune -exec rm -r {} +

FROM pip AS sidecar-libraries
RUN /pip/bin/pip --python /opt/pykvcache/bin/python install --quiet "$(ls /requirements/*.whl)[node,cli]" \
    && find /opt/pykvcache -type d -name tests -prune -exec rm -r {} +

FROM pip AS bench-libraries
RUN /pip/bin/pip --python /opt/pykvcache/bin/python install --quiet "$(ls /requirements/*.whl)[bench]"

# ---- our code, once for all targets: /code goes over /opt/pykvcache, /library into vLLM's PYTHONPATH
FROM pip AS code
WORKDIR /source
COPY . .
RUN /pip/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir /wheel . \
    && /pip/bin/pip --python /opt/pykvcache/bin/python install --quiet --no-deps --prefix /code /wheel/*.whl

# Only what no vLLM image has: pydantic and prometheus-client put before vLLM's own would replace them. Nothing in it is
# made for one Python: liburing's file is called as a C library, and without byte code no Python finds another's.
FROM code AS connector-libraries
RUN /pip/bin/pip install --quiet --no-deps --no-compile --target /library /wheel/*.whl liburing \
    && cd /library \
    && rm -rf bin pykvcache_bench pykvcache_cli pykvcache_operator pykvcache_sidecar liburing/*.zig \
    && chmod -R u=rwX,go=rX .

# ---- what runs: no compiler, no pip, no root
FROM ${BASE} AS runtime
ENV PATH=/opt/pykvcache/bin:$PATH PYTHONUNBUFFERED=1
RUN echo 'pykvcache:x:65532:' >> /etc/group \
    && echo 'pykvcache:x:65532:65532::/nonexistent:/usr/sbin/nologin' >> /etc/passwd
WORKDIR /
USER 65532:65532

FROM runtime AS operator
COPY --from=operator-libraries /opt/pykvcache /opt/pykvcache
COPY --from=code /code /opt/pykvcache
CMD ["pykvcache-operator", "--help"]

# As a node agent it runs as root, by the pod's securityContext, and calls mount.
FROM runtime AS sidecar
RUN command -v mount umount
COPY --from=sidecar-libraries /opt/pykvcache /opt/pykvcache
COPY --from=code /code /opt/pykvcache
CMD ["pykvcache-sidecar", "--help"]

FROM runtime AS bench
COPY --from=bench-libraries /opt/pykvcache /opt/pykvcache
COPY --from=code /code /opt/pykvcache
CMD ["pykvcache", "--help"]

# Copies the library into the directory given as argument, without a shell. A second copy replaces the files of the first
# by new ones, since a process may still have them mapped.
FROM runtime AS connector
COPY --from=connector-libraries /library /library
ENTRYPOINT ["cp", "-rT", "--remove-destination", "/library"]
