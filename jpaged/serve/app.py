"""The app: every route, and what a failure looks like."""

import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import jpaged
from jpaged.serve.answers import ChatAnswer, CompletionAnswer
from jpaged.serve.config import ServeConfig
from jpaged.serve.errors import ApiError, bad_request
from jpaged.serve.generation import Generation
from jpaged.serve.json_body import Body
from jpaged.serve.limits import ApiKeys, read_body
from jpaged.serve.loading import EngineLoader
from jpaged.serve.openapi import describe_bodies
from jpaged.serve.prompts import chat_prompt, completion_prompts, encode
from jpaged.serve.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jpaged.serve.streaming import json_response

PLAIN_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(loader: EngineLoader, config: ServeConfig) -> FastAPI:
    """The ASGI app. It answers 503 until the loader has the engine; whoever made the loader shuts the engine down."""
    routes = Routes(loader, config)
    app = FastAPI(title="jpaged", version=jpaged.__version__, root_path=config.root_path)
    posts = {
        "/v1/completions": (routes.create_completion, CompletionBody),
        "/v1/chat/completions": (routes.create_chat_completion, ChatBody),
        "/tokenize": (routes.tokenize, TokenizeBody),
        "/detokenize": (routes.detokenize, DetokenizeBody),
    }
    for path, (function, _) in posts.items():
        app.add_api_route(path, function, methods=["POST"], response_class=Response)
    describe_bodies(app, {path: body for path, (_, body) in posts.items()})
    for path, function in (
        ("/v1/models", routes.list_models),
        ("/v1/models/{model:path}", routes.show_model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
    ):
        app.add_api_route(path, function, methods=["GET"], response_class=Response)
    if config.developer_mode:
        app.add_api_route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"], response_class=Response)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_our_error)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key)
    if config.allowed_origins:  # added last, so that it answers a browser's preflight, which brings no key
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Routes:
    """What each route answers."""

    def __init__(self, loader: EngineLoader, config: ServeConfig):
        self._loader = loader
        self._config = config
        self._created = int(time.time())

    async def create_completion(self, request: Request) -> Response:
        engine = self._loader.engine()
        body = await self._parse(request, CompletionBody)
        model = self._model_name(engine, body.model)
        prompts = await completion_prompts(engine, body)
        generation = Generation(engine, CompletionAnswer, model, body, prompts, DEFAULT_COMPLETION_TOKENS)
        return generation.response()

    async def create_chat_completion(self, request: Request) -> Response:
        engine = self._loader.engine()
        body = await self._parse(request, ChatBody)
        model = self._model_name(engine, body.model)
        prompt = await chat_prompt(engine, body, body.add_special_tokens)
        return Generation(engine, ChatAnswer, model, body, [prompt], None).response()

    async def tokenize(self, request: Request) -> Response:
        engine = self._loader.engine()
        body = await self._parse(request, TokenizeBody)
        self._model_name(engine, body.model)
        tokenizer = engine.tokenizer
        if body.prompt is None:
            tokens = await chat_prompt(engine, body, body.add_special_tokens)
        else:
            tokens = await encode(engine, body.prompt, body.add_special_tokens is not False, "prompt")
        strings = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        engine = self._loader.engine()
        body = await self._parse(request, DetokenizeBody)
        self._model_name(engine, body.model)
        vocab_size = engine.tokenizer.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise bad_request(f"tokens must be in [0, {vocab_size}), got {token}", "tokens")
        return json_response({"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def list_models(self) -> Response:
        engine = self._loader.engine()
        return json_response(
            {"object": "list", "data": [self._model_card(engine, name) for name in _served_names(engine)]}
        )

    async def show_model(self, request: Request) -> Response:
        engine = self._loader.engine()
        return json_response(self._model_card(engine, self._model_name(engine, request.path_params["model"])))

    async def health(self) -> Response:
        return self._state_response(self._trouble())

    async def ready(self) -> Response:
        trouble = self._trouble()
        engine = self._loader.engine_or_none()
        if trouble is not None or engine is None:
            return self._state_response(trouble)
        progress = engine.progress
        counts = {"num_compiled": progress.num_compiled, "num_programs": progress.num_programs}
        if progress.is_complete:
            return self._state_response(None, counts)
        reason = "{num_compiled} of {num_programs} programs are compiled; requests are answered all the same"
        if progress.error is not None:
            reason += f"; compiling ahead was given up: {progress.error}"
        return self._state_response(("compiling", reason.format(**counts)), counts)

    async def version(self) -> Response:
        return json_response({"version": jpaged.__version__})

    async def metrics(self) -> Response:
        return Response(self._loader.engine().metrics.render(), media_type=PLAIN_METRICS)

    async def reset_prefix_cache(self) -> Response:
        try:
            is_reset = await self._loader.engine().reset_prefix_cache()
        except RuntimeError as error:
            raise ApiError(500, str(error)) from error
        if not is_reset:
            raise ApiError(409, "the prefix cache is in use by running requests: try again when they have ended")
        return json_response({"status": "ok"})

    def _trouble(self) -> tuple[str, str] | None:
        """(status, reason) of what keeps the engine from answering."""
        engine = self._loader.engine_or_none()
        if engine is None:
            return "loading", "the model is loading"
        try:
            engine.check_health()
        except RuntimeError as error:
            return "dead", str(error)
        return None

    def _state_response(self, trouble: tuple[str, str] | None, more: dict | None = None) -> Response:
        if trouble is None:
            return json_response({"status": "ok"} | (more or {}))
        status, reason = trouble
        return json_response({"status": status, "reason": reason} | (more or {}), 503, {"Retry-After": "5"})

    async def _parse[T: Body](self, request: Request, body_class: type[T]) -> T:
        return body_class.parse(await read_body(request, self._config.max_body_size))

    def _model_name(self, engine: "jpaged.AsyncLLM", asked: str | None) -> str:
        """The name to answer under. Raises a 404 for a model that is not served."""
        names = _served_names(engine)
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(404, f"the model {asked!r} is not served here, only {', '.join(names)}", param="model")
        return asked

    def _model_card(self, engine: "jpaged.AsyncLLM", name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jpaged",
            "root": engine.config.model,
            "max_model_len": engine.max_model_len,
        }


def _served_names(engine: "jpaged.AsyncLLM") -> tuple[str, ...]:
    return engine.config.served_model_name or (engine.config.model,)


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {request.url.path}"
    return json_response(ApiError(error.status_code, message).body(), error.status_code, error.headers)


async def _on_our_error(request: Request, error: Exception) -> Response:
    # the log gets the traceback, a client no internals; uvicorn closes the connection after it
    return json_response(ApiError(500, "an internal error: see the server's log").body(), 500, {"Connection": "close"})
