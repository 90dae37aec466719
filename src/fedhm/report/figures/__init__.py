"""The figures of a report, drawn by matplotlib."""
