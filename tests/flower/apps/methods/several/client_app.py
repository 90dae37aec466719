"""As `fedhm run` submits it, but for one question more."""

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedhm.flower.clients import config_client_app

app = config_client_app()


@app.query("node")
def node(message: Message, context: Context) -> Message:
    """Say which node config this client has."""
    return Message(RecordDict({"node": ConfigRecord(dict(context.node_config))}), reply_to=message)
