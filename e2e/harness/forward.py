"""Carry connections from the host into a cluster: a program of its own, run inside the cluster's network namespace.

    python forward.py FD ADDRESS PORT

FD is a listening socket that was opened outside. A socket stays in the namespace where it was made, so what the host
connects to is answered from inside, without an interface between the two.
"""

import asyncio
import socket
import sys

CHUNK_BYTES = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other end went away; so do we
    finally:
        writer.close()


async def _serve(listener: socket.socket, *, address: str, port: int) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(address, port)
        except OSError:
            writer.close()  # nothing listens there yet; the client tries again
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(accept, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    fd, address, port = sys.argv[1:]
    asyncio.run(_serve(socket.socket(fileno=int(fd)), address=address, port=int(port)))
