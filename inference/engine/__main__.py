"""`python -m atropos.inference.engine`: serve one model over HTTP.

Invariant: everything that can be refused is refused before the model is loaded, in one sentence and with exit code 2;
the address is bound first, so that a taken port costs nothing. Exit code 1: sampling died.
"""

import argparse
import contextlib
import gc
import importlib.util
import ipaddress
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...settings import secret_from_environment

NEEDED = ("torch", "transformers", "safetensors", "starlette", "uvicorn")


class Refused(Exception):
    """Input that cannot be served, as one sentence."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.token = _token(arguments.token, arguments.token_env)
        _require_packages()
        _require_model(arguments.model)
        listener = _bind(arguments.host, arguments.port, arguments.token)
        return _serve(arguments, listener)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m atropos.inference.engine", description="Serve a small model.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json, model.safetensors and a tokenizer")
    add("--port", type=int, required=True, help="port to listen on; 0 picks a free one and prints it")
    add("--host", default="127.0.0.1")
    add("--served-model-name", default="policy", help="the name that requests must give as model")
    add("--journal", type=Path, help="append a line for every sampled token to this file")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--max-model-len", type=_positive, help="tokens of prompt and answer; default: what the model has")
    add("--max-num-seqs", type=_positive, default=128, help="requests computed in one step")
    add("--kv-cache-mb", type=_positive, default=512, help="memory for keys and values, in MiB")
    add("--threads", type=_positive, help="torch threads on a CPU; default: half the cores, at most 4")
    add("--token", help="bearer token that requests must carry; needed to listen beyond this machine")
    add("--token-env", help="variable that holds the token, which then does not show in lists of processes")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _token(token: str | None, variable: str | None) -> str | None:
    if variable is None:
        return token
    if token is not None:
        raise Refused("--token and --token-env both name the token; give one of them.")
    held = secret_from_environment(variable)
    if held is None:
        raise Refused(f"The environment variable {variable}, which --token-env names, is empty.")
    return held


def _require_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(
            f"The dev engine needs {', '.join(missing)}: pip install 'atropos-durable[engine]'"
            " (small CPU builds of torch: https://pytorch.org/get-started/locally)."
        )


def _require_model(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is a file; --model names the folder that a model was saved to.")
    if not folder.is_dir():
        raise Refused(f"There is no folder {folder}; --model names a folder with config.json and weights.")
    if not (folder / "config.json").is_file():
        raise Refused(f"{folder} holds no config.json; --model names a folder that a model was saved to.")


def _bind(host: str, port: int, token: str | None) -> socket.socket:
    if not token and not _loopback(host):
        raise Refused(
            f"Listening on {host} would open the engine to others: add --token-env or --token, or use 127.0.0.1."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Listening at once: a second engine on this port must fail now, not when its model is loaded.
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Refused(f"Cannot listen on {host}:{port} ({reason}); choose another --port.") from error
    return listener


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(arguments: argparse.Namespace, listener: socket.socket) -> int:
    # Waiting threads must sleep, not spin: on a machine that also runs workers and a database, spinning was 6 times
    # slower. Read by OpenMP when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        from .batching import Unsupported
        from .chat import load_chat
        from .loading import limits, load, pick_device
        from .scheduler import Engine
        from .server import Served, Server, create_app
    except ImportError as error:
        raise Refused(f"This transformers does not fit the dev engine ({error}); install 5.24 or newer.") from error
    from .journal import Journal

    # Sampling and HTTP share the interpreter; at the default of 5 ms each would wait long for the other's turn.
    sys.setswitchinterval(0.0005)
    torch.set_num_threads(arguments.threads or _default_threads())
    try:
        device = pick_device(arguments.device)
        loaded = load(arguments.model, device, arguments.dtype, arguments.max_model_len)
        sizes = limits(loaded, arguments.max_num_seqs, arguments.kv_cache_mb)
        journal = Journal(arguments.journal)
    except Unsupported as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"The journal {arguments.journal} cannot be opened: {error.strerror}.") from error

    servers: list[Server] = []
    died: list[str] = []

    def on_fatal(reason: str) -> None:
        died.append(reason)
        for server in servers:
            server.should_exit = True

    engine = Engine(loaded.model, arguments.model, sizes, loaded.context, loaded.eos_ids, journal, on_fatal)
    served = Served(engine, load_chat(arguments.model), arguments.served_model_name, _version())
    servers.append(Server(create_app(served, arguments.token), engine))
    # What is alive now stays; collections then look at requests only.
    gc.collect()
    gc.freeze()
    host, port = listener.getsockname()[:2]
    print(f"Serving {arguments.served_model_name} at http://{host}:{port} on {device}.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        servers[0].run(sockets=[listener])
    if died:
        print(f"Sampling died, so the engine stopped. {died[0]}", file=sys.stderr)
    return 1 if died else 0


def _default_threads() -> int:
    """Half the cores, since the engine's own HTTP side and its callers need the others; beyond 4, small models only
    wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // 2))


def _version() -> str:
    try:
        return version("atropos-durable")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
