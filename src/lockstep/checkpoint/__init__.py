"""Tensors and JSON on disk, every byte under a digest: `store` saves, `manifest` verifies, `writer` writes behind."""
