"""ZMQ-direct workers: headless engine cores on this host, in token ids, with no engine server in between.

``addresses`` names the sockets, ``handshake`` answers engines that dial, ``vllm`` and ``tokenspeed`` are the two wire
formats, ``codecs`` builds requests (tokenizer processes), ``client`` and ``sockets`` run them (detok processes).
"""
