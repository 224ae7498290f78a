from typing import Any

logging: Any
