"""As `fedhm run` submits it."""

from fedhm.flower.clients import named_client_app

app = named_client_app()
