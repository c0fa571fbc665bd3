"""Samples of a run, streamed back in an order that is a formula: `order`, `reader`, `loader`."""

from dflash_stream.stream.loader import TrainStream, make_loader, validation_samples
from dflash_stream.stream.order import Order
from dflash_stream.stream.reader import Counters, SampleReader
from dflash_stream.stream.sample import MicroBatch, Sample
from dflash_stream.stream.webdataset import webdataset_pipeline

__all__ = [
    "Counters",
    "MicroBatch",
    "Order",
    "Sample",
    "SampleReader",
    "TrainStream",
    "make_loader",
    "validation_samples",
    "webdataset_pipeline",
]
