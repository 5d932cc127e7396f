"""Sinks of events: what is done with the records of `averagers.events`."""
