"""SGLang's wire in front of a dev engine: real tokens, logprobs and reloads in the shapes that SGLang gives them.

Invariant: nothing is computed here but what the dev engine does not report, which is how far one token leads another.
"""

import asyncio
import json
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from atropos.tests.inference import sglang_wire as wire
from atropos.tests.inference.servers import Seen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

GENERATE = "/inference/v1/generate"


class Facade:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    def app(self) -> Starlette:
        gets = [Route("/model_info", self.model_info), Route("/server_info", self.server_info)]
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.load,
            "/update_weight_version": self.name,
        }
        return Starlette(routes=gets + [Route(path, call, methods=["POST"]) for path, call in posts.items()])

    async def model_info(self, _: Request) -> Response:
        return JSONResponse(wire.model_info(await self._label()))

    async def server_info(self, _: Request) -> Response:
        life = (await self._client.get("/weight_info")).json()["incarnation"]
        context = (await self._client.get("/v1/models")).json()["data"][0]["max_model_len"]
        return JSONResponse(wire.server_info(seed=zlib.crc32(life.encode()), max_req_input_len=context - 6))

    async def pause(self, request: Request) -> Response:
        assert (await request.json())["mode"] == "retract"
        return await self._post("/pause?mode=keep&clear_cache=true", None)

    async def resume(self, _: Request) -> Response:
        return await self._post("/resume", None)

    async def load(self, request: Request) -> Response:
        body = await request.json()
        kwargs = {"weights_path": body["model_path"]}
        answer = await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        if answer.status_code != 200:
            message = f"Failed to update weights: {bytes(answer.body).decode()}"
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        await self._post("/update_weight_version", {"new_version": body["weight_version"]})
        return JSONResponse({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def name(self, request: Request) -> Response:
        return await self._post("/update_weight_version", {"new_version": (await request.json())["new_version"]})

    async def generate(self, request: Request) -> Response:
        sent = await request.json()
        asked = sent["sampling_params"]
        scores = asked["max_new_tokens"] == 0
        parameters = {
            "max_tokens": asked["max_new_tokens"] or 1,
            "temperature": asked["temperature"],
            "stop_token_ids": asked.get("stop_token_ids") or [],
            "ignore_eos": scores or asked.get("ignore_eos", False),
            "seed": asked.get("sampling_seed"),
            "logprobs": 1,
        } | ({"prompt_logprobs": 0} if scores else {})
        body = {
            "model": self._model,
            "token_ids": sent["input_ids"],
            "stream": sent["stream"],
            "sampling_params": parameters,
        }
        if sent["stream"]:
            return StreamingResponse(self._streamed(sent, body), media_type="text/event-stream")
        answer = await self._client.post(GENERATE, json=body)
        if answer.status_code != 200:
            return JSONResponse({"error": {"message": answer.text}}, answer.status_code)
        found = answer.json()
        if scores:
            return JSONResponse(_scored(sent, found))
        choice = found["choices"][0]
        made = _answer(sent, choice["token_ids"], choice["logprobs"]["content"], choice["weight_versions"], choice)
        if "top_logprobs_num" in sent:
            made["meta_info"]["output_top_logprobs"] = [[[-0.1, 1, None], [-0.1 - 2 / asked["temperature"], 2, None]]]
        return JSONResponse(made)

    async def _streamed(self, sent: Any, body: Any) -> AsyncIterator[bytes]:
        ids: list[int] = []
        content: list[Any] = []
        spans: list[Any] = []
        async with self._client.stream("POST", GENERATE, json=body) as answer:
            async for line in answer.aiter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"choices": []}
                for choice in event["choices"]:
                    spans += [
                        {"version": s["version"], "start": s["start"] + len(ids), "end": s["end"] + len(ids)}
                        for s in choice["weight_versions"]
                    ]
                    ids += choice["token_ids"]
                    content += choice["logprobs"]["content"] if choice["token_ids"] else []
                    yield f"data: {json.dumps(_answer(sent, ids, content, spans, choice))}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def _label(self) -> str:
        return str((await self._client.get("/weight_info")).json()["weight_version"])

    async def _post(self, path: str, body: Any) -> Response:
        answer = await self._client.post(path, json=body)
        return Response(answer.content, answer.status_code, media_type="application/json")


def _answer(sent: Any, ids: list[int], content: list[Any], spans: list[Any], choice: Any) -> dict[str, Any]:
    reason = choice["finish_reason"]
    finish = {"stop": wire.stopped(ids[-1] if ids else -1), "length": wire.cut(len(ids)), "abort": wire.aborted()}
    labels = [span["version"] for span in spans for _ in range(span["end"] - span["start"])]
    logprobs = [[item["logprob"], item["token_id"], None] for item in content]
    seen = Seen("POST", "/generate", {}, json.dumps(sent).encode())
    return wire.generated(seen, list(ids), labels or ["default"], finish.get(reason), output_token_logprobs=logprobs)


def _scored(sent: Any, found: Any) -> dict[str, Any]:
    ids = sent["input_ids"]
    rest = [[entry[str(i)]["logprob"], i, None] for i, entry in zip(ids[1:], found["prompt_logprobs"][1:], strict=True)]
    label = found["choices"][0]["weight_versions"][0]["version"]
    meta = {"weight_version": label, "weight_versions": [{"version": label, "start": 0, "end": 0}]}
    meta |= {"finish_reason": wire.cut(0), "prompt_tokens": len(ids), "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta | {"input_token_logprobs": [[None, ids[0], None], *rest]}}


@asynccontextmanager
async def sglang_in_front(url: str, model: str) -> AsyncIterator[str]:
    """Where it answers."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        server = uvicorn.Server(uvicorn.Config(Facade(client, model).app(), log_level="warning", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server.serve([listener]))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            await running
