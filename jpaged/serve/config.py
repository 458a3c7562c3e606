"""ServeConfig: what the user decides about the server, beside the engine."""

from dataclasses import dataclass, field

from jpaged.metrics import DEFAULT_PREFIX


def _option(default, help, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Every knob of the HTTP server; the flags are these fields with dashes.

    Raises ValueError that names the field, the value and the limit.
    """

    host: str = _option("127.0.0.1", "the address to listen on; 0.0.0.0 for every interface")
    port: int = _option(8000, "the port to listen on; 0 takes a free one")
    uds: str | None = _option(None, "a Unix socket to listen on instead of host and port")
    api_key: tuple[str, ...] = _option(
        (), "keys of which a client must bring one, as a bearer token (default: none is needed)", env="JPAGED_API_KEY"
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "web origins whose pages may call the server; * for all (default: none)"
    )
    ssl_keyfile: str | None = _option(None, "the private key for https")
    ssl_certfile: str | None = _option(None, "the certificate for https")
    root_path: str = _option("", "the path under which a proxy publishes the server")
    max_body_size: int = _option(32 * 2**20, "bytes that a request's body may have (default: 32M)")
    shutdown_timeout: int = _option(0, "seconds that running requests get to finish when the server is told to stop")
    access_log: bool = _option(True, "a line for each request")
    developer_mode: bool = _option(False, "also serve POST /reset_prefix_cache")
    log_stats: bool = _option(True, "a line of rates every ten seconds while requests run", off="--disable-log-stats")
    metrics_prefix: str = _option(
        DEFAULT_PREFIX, "what metric names start with; vllm: keeps existing dashboards working"
    )

    def __post_init__(self):
        object.__setattr__(self, "api_key", tuple(self.api_key))
        object.__setattr__(self, "allowed_origins", tuple(self.allowed_origins))
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        if self.max_body_size < 1:
            raise ValueError(f"max_body_size must be at least 1, got {self.max_body_size}")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}")
        if any(not key.strip() for key in self.api_key):
            raise ValueError("api_key must not be blank")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile need each other: give both or neither")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path must start with /, got {self.root_path!r}")
