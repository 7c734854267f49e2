"""The addresses under which a run is watched."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Header, Query, Request, Response, status

from coordinator.addresses import ActivationId, RunId
from coordinator.errors import Refusal, refusals
from coordinator.operations.access import Anyone, DatabaseHere, GuardedRoute
from coordinator.policies.endpoints import WatchersHere
from coordinator.watching import timeline
from coordinator.watching.feeds import Feeds
from coordinator.watching.stream import EventStream, told
from coordinator.wire.event_stream import MEDIA_TYPE, encode_event
from coordinator.wire.timelines import ActivationTimeline

router = APIRouter(prefix="/v1/runs/{run_id}", route_class=GuardedRoute)

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events, for as long as the connection lasts",
        "content": {
            MEDIA_TYPE: {
                "schema": {"description": "The stream as a whole; itemSchema is of one event."},
                "itemSchema": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "description": "the event_no, to continue after"},
                        "event": {"type": "string", "description": "the event's name in the journal, or watch"},
                        "data": {
                            "type": "string",
                            "contentMediaType": "application/json",
                            "contentSchema": {
                                "anyOf": [
                                    {"$ref": "#/components/schemas/JournalEntry"},
                                    {"$ref": "#/components/schemas/Watch"},
                                ]
                            },
                        },
                        "retry": {"type": "integer", "description": "milliseconds before a browser connects again"},
                    },
                },
            }
        },
    }
}
_PREFIX = r"[a-z]+(\.[a-z_]*)?"


async def feeds_of(request: Request) -> Feeds:
    """Those who read the journals of this app's runs as they grow."""
    return cast(Feeds, request.app.state.feeds)


FeedsHere = Annotated[Feeds, Depends(feeds_of)]


@router.get(
    "/events/stream",
    tags=["runs"],
    status_code=status.HTTP_200_OK,
    response_class=Response,  # the description is above, not EventStream's
    responses=refusals("run_unknown") | STREAM,
)
async def stream_events(
    run_id: RunId,
    caller: Anyone,
    watchers: WatchersHere,
    feeds: FeedsHere,
    after: Annotated[
        int | None, Query(ge=0, le=2**53, description="the event_no seen last; left out: begin with what comes now")
    ] = None,
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID",
            pattern=r"^[0-9]{0,15}$",
            description="the id seen last, as browsers send it when they connect again; it comes before `after`",
            examples=["6"],
        ),
    ] = "",
    events: Annotated[
        str,
        Query(
            max_length=200,
            pattern=rf"^({_PREFIX}(,{_PREFIX})*)?$",
            description="only events whose name begins with one of these, separated by commas: policy.,activation.",
        ),
    ] = "",
    wait_seconds: Annotated[
        float | None,
        Query(ge=0, le=86400, description="end after this time; 0: with what is there now; left out: go on"),
    ] = None,
) -> EventStream:
    """Follow the journal as server-sent events: id is the event_no, event the name, data the journal's entry.

    It continues after `Last-Event-ID`, or `after`, and never leaves an entry out or tells one twice, whichever replica
    answers. Without both it begins with an event `watch`, whose data is what `GET watch` answers, and goes on from
    there. A comment goes over at least every 15 s. The stream ends when the token ends, or the server: connect again.
    """
    view = await watchers.answer(run_id, lambda _: True, 0)
    seen = int(last_event_id) if last_event_id else after
    if seen is not None and seen > view.event_no:
        field = "Last-Event-ID" if last_event_id else "after"
        raise Refusal("invalid_request", f"the newest event of run {run_id} is {view.event_no}", field=field)
    first = b"" if seen is not None else encode_event(view.event_no, "watch", view.model_dump_json())
    begin = view.event_no if seen is None else seen
    reading = feeds.read(run_id, begin, caller.token_id, view.event_no)
    return EventStream(told(reading, first, tuple(events.split(",")) if events else (), wait_seconds))


@router.get(
    "/activations/{activation_id}/timeline", tags=["policies"], responses=refusals("run_unknown", "activation_unknown")
)
async def get_timeline(
    run_id: RunId, activation_id: ActivationId, caller: Anyone, database: DatabaseHere
) -> ActivationTimeline:
    """Show how an activation went: version, switch and each worker's stages, with seconds since the opening.

    Which worker took long, and for what: downloading, verifying, loading.
    """
    return await database.transaction(timeline.get_timeline, run_id, activation_id)
