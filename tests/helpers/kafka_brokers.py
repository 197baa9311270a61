"""Brokers for tests: librdkafka's own mock cluster, which speaks Kafka's protocol on real sockets. Kafka
itself needs Java and is in no package here."""

import json
from typing import Any

import numpy as np
import pytest

DTYPES = {"fp32": "<f4", "fp16": "<f2"}
PARTITIONS = 4  # of each topic that is made by its first message


class Brokers:
    """Runs until it goes. hosts: as a URL names them."""

    def __init__(self, brokers: int = 1) -> None:
        kafka = pytest.importorskip("confluent_kafka", reason="the kafka extra brings it")
        mock = {"bootstrap.servers": "mock", "test.mock.num.brokers": brokers, "log_level": 0}
        self._cluster = kafka.Producer(mock)
        there = self._cluster.list_topics(timeout=60).brokers.values()
        self.hosts = ",".join(f"{one.host}:{one.port}" for one in there)
        self._producer = kafka.Producer({"bootstrap.servers": self.hosts, "log_level": 0, "linger.ms": 0})

    def url(self, topics: str, **options: str) -> str:
        return f"kafka://{self.hosts}/{topics}?" + "&".join(f"{k}={v}" for k, v in options.items())

    def send(self, topic: str, value: bytes | None, partition: int = 0, **more: Any) -> None:
        """Sends a message, and returns when brokers have it."""
        failed: list[Any] = []
        self._producer.produce(
            topic, value, partition=partition, on_delivery=lambda error, _: failed.append(error), **more
        )
        assert self._producer.flush(60) == 0 and failed == [None]

    def rows(self, topic: str, ids: list[int], vectors: Any, partition: int = 0, **headers: str) -> None:
        """Sends rows in the form `rows`; vectors None: their deletion."""
        value = (
            None if vectors is None else np.asarray(vectors, DTYPES[headers.get("dtype", "fp32")]).tobytes()
        )
        key = np.array(ids, "<i8").tobytes()
        self.send(topic, value, partition, key=key, headers={k: v.encode() for k, v in headers.items()})

    def json(self, topic: str, change: dict[str, Any], partition: int = 0) -> None:
        self.send(topic, json.dumps(change).encode(), partition)
