"""The command ``openenv`` without the packages that its modules import and that validating does not use.

They are some hundred, and one of them (gradio) excludes the versions that this project is tested with.
"""

import sys
from unittest import mock

UNUSED = ("fastapi", "fastmcp", "fastmcp.client", "fastmcp.client.client", "mcp", "mcp.types", "openai", "tomli")
UNUSED += ("tomli_w",)


if __name__ == "__main__":
    sys.modules |= {name: mock.MagicMock() for name in UNUSED}
    from openenv.cli.__main__ import main

    main()
