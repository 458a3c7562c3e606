"""The bodies of requests for /openapi.json: routes parse them by hand, so FastAPI cannot see them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from jpaged.serve.json_body import Body

_REF = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: dict[str, type[Body]]) -> None:
    """Makes app.openapi() show, for each POST path, the body it takes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for path, body in bodies.items():
                own = body.model_json_schema(ref_template=_REF)
                schemas |= own.pop("$defs", {}) | {body.__name__: own}
                content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
                schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi
