"""A scripted engine that can be given weights: it speaks vLLM's control routes and holds the tensors of a folder.

Its words stay scripted; what it says about its weights is true of the files it was told to load.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .scripted import Script, ScriptedEngine


def add_weights(
    folder: Path, *, seed: int = 7, width: int = 16, layers: int = 1, tied: bool = False, times: float = 1.0
) -> Path:
    """Random weights of a very small Llama in a folder that has a tokenizer. `times`: by how much its matrices are
    larger than usual; the larger, the less alike are the logprobs of two seeds."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(str(folder))),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(times)
    model.save_pretrained(str(folder))
    return folder


def every_other(right: str, wrong: str) -> Script:
    """The right answer, then the wrong one, whoever asks: half of each group is rewarded."""
    asked = iter(range(10**9))
    return lambda prompt, turn: right if next(asked) % 2 else wrong


@dataclass
class WeightedEngine(ScriptedEngine):
    """`loaded`: what it was told to load, in order. `loads_instead`: a folder it takes whatever it is told to load.
    `fails_to_name`: a label for which it answers 500, once. `asked_with`: what its weights were called when it was
    asked for a completion, request by request. `loadable`: nothing is paused, and so loaded, while it is not set."""

    loaded: list[str] = field(default_factory=list)
    loads_instead: Path | None = None
    fails_to_name: str | None = None
    paused: bool = False
    incarnation: str = "scripted"
    asked_with: list[str] = field(default_factory=list)
    loadable: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._going = asyncio.Event()
        self._going.set()
        self.loadable.set()
        self._holds = self.model

    def restart(self) -> None:
        """As if its process had been killed and started again with the model it began with."""
        self.label, self._holds = "default", self.model
        self.incarnation = f"{self.incarnation}+"

    def release(self) -> None:
        """Let nothing wait any more, neither a load nor a completion."""
        super().release()
        self.loadable.set()
        self._going.set()

    def routes(self) -> list[Route]:
        own = [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/collective_rpc", self._reload, methods=["POST"]),
            Route("/update_weight_version", self._name, methods=["POST"]),
            Route("/weight_checker", self._digests, methods=["POST"]),
        ]
        return own + super().routes()

    async def _generate(self, request: Request) -> Response:
        self.asked_with.append(self.label)
        await self._going.wait()
        return await super()._generate(request)

    def _answer(self, body: dict[str, Any], ids: list[int], *, cut: bool) -> dict[str, Any]:
        return super()._answer(body, ids, cut=cut) | {"incarnation": self.incarnation}

    async def _weights(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label, "incarnation": self.incarnation}, 503 if self.down else 200)

    async def _pause(self, request: Request) -> Response:
        await self.loadable.wait()
        self.paused = True
        self._going.clear()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self.paused = False
        self._going.set()
        return JSONResponse({"status": "resumed"})

    async def _reload(self, request: Request) -> Response:
        if not self.paused:
            return JSONResponse({"error": {"message": "not paused"}}, 409)
        path = (await request.json())["kwargs"]["weights_path"]
        self.loaded.append(path)
        self._holds = self.loads_instead or Path(path)
        self.label = "unversioned"
        return JSONResponse({"results": [None]})

    async def _name(self, request: Request) -> Response:
        label = (await request.json())["new_version"]
        if label == self.fails_to_name:
            self.fails_to_name = None
            return JSONResponse({"error": {"message": "no"}}, 500)
        self.label = label
        return JSONResponse({"success": True, "new_version": self.label})

    async def _digests(self, request: Request) -> Response:
        tensors = load_file(self._holds / "model.safetensors")
        digests = {f"dp0:pp0:pcp0:tp0:{name}": _digest(tensor) for name, tensor in tensors.items()}
        return JSONResponse({"checksums": digests})


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
