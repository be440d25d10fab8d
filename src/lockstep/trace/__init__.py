"""What a worker measures and writes while it trains: times, metrics, gradient noise (docs/trace.md)."""
