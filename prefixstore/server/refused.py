"""Why a request is refused."""

from __future__ import annotations

# as llama-server names them
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    500: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "unavailable_error",
}
OTHER_KIND = "invalid_request_error"


class RefusedError(Exception):
    """A request that is answered with an error of this status. The text is for its client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
