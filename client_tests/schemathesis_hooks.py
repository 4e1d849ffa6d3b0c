"""Makes most generated requests name a model that is served and ask for few tokens, so that they reach the engine soon."""

from __future__ import annotations

import schemathesis

MODEL = "dummy"
LIMITS = {"max_tokens": 20, "max_completion_tokens": 20, "n": 3}


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(str(body)) % 16:
        body["model"] = MODEL
        if body.get("max_tokens") is None:
            body["max_tokens"] = 5
        for name, limit in LIMITS.items():
            if isinstance(body.get(name), int) and body[name] > limit:
                body[name] = limit
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and len(str(path_parameters)) % 2:
        path_parameters["model"] = MODEL
    return path_parameters
