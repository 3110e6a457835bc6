"""The embedded engine behind the gRPC worker protocols: one adapter per engine kind, one front for all of them."""
