"""Flower's SuperLink, which takes runs only from whoever has a token.

Whoever may start a run has code of theirs executed. Flower's SuperLink can ask for an account, but the published
package has no kind of account to choose. So this gives it one: whoever has the token is the one account that there is
without logins. Flower's own command sends the token, which it finds in its FLWR_HOME (`private.py`).

This file is run by its path, `python -P guarded_superlink.py TOKEN_FILE flower-superlink …`, since importing the
package would take seconds.
"""

import hmac
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.superlink.auth_plugin import ControlAuthnPlugin

Metadata = Sequence[tuple[str, str | bytes]]


class Bearer(ControlAuthnPlugin):
    """The account of whoever has the token."""

    def __init__(self, token: str = "") -> None:
        self._token = token

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        return None

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        given = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            return False, None
        return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:  # noqa: ARG002
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:  # noqa: ARG002
        return None, None


if __name__ == "__main__":
    _, token_file, *sys.argv = sys.argv
    bearer = Bearer(Path(token_file).read_text())
    command: Any = import_module("flwr.superlink.cli.flower_superlink")  # which a function of this name hides
    command.load_control_authn_plugin = lambda: bearer
    command.flower_superlink()
