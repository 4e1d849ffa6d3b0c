"""Makes most generated requests name a model that is served and ask for few tokens, so that they reach the engine."""

from __future__ import annotations

import schemathesis

MODEL = "dummy"


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and "model" in body and len(str(body)) % 16:
        body["model"] = MODEL
        if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 20:
            body["max_tokens"] = 20
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and len(str(path_parameters)) % 2:
        path_parameters["model"] = MODEL
    return path_parameters
