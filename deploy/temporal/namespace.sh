#!/bin/sh
# Make the namespace, and keep histories as long as runs need them. Workers register their search attributes themselves.
set -eu
operator() {
    temporal operator "$@" --address "$TEMPORAL_ADDRESS"
}
patiently() { # a server that starts, and one that has just been told of a namespace, need some seconds
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ "$tries" -ge 60 ]; then
            "$@"
            exit 1
        fi
        sleep 1
    done
}
patiently operator cluster health
operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1 ||
    operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
patiently operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"
