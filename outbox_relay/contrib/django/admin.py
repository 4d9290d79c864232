"""Events and deliveries in Django's admin: read, retried and discarded.

Lists search among the newest rows only, so that their pages take the same time whatever the size of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.contrib.admin.views.main import ChangeList
from django.db import Error, router
from django.db.models import BigIntegerField, Func, QuerySet, Value
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from outbox_relay.contrib.django import acting, looking
from outbox_relay.contrib.django.databases import LABEL
from outbox_relay.contrib.django.models import EventDelivery, LoggedEvent

if TYPE_CHECKING:
    EventAdmin: TypeAlias = admin.ModelAdmin[LoggedEvent]
    DeliveryAdmin: TypeAlias = admin.ModelAdmin[EventDelivery]
else:
    EventAdmin = DeliveryAdmin = admin.ModelAdmin

REASON_LENGTH = 500
"""Maximum number of characters of a reason."""


REFUSALS: Final = {
    "42501": (
        403,
        "The database role of this site may not read schema outbox: outbox-relay migrate --grant-read ROLE.",
    ),
    "57014": (503, f"A query took more than {looking.SECONDS} seconds and was cancelled. Try again later."),
    **dict.fromkeys(
        ("3F000", "42P01", "42703", "42883"),
        (503, "Schema outbox is missing or old: manage.py migrate outbox_relay, then manage.py outbox migrate."),
    ),
}
"""Status and text of the page that an error of the database leads to, by SQLSTATE."""


class ReadOnly:
    """Rights of an admin that shows rows and changes none by a form."""

    paginator = looking.ShortPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 100
    list_max_show_all = looking.MOST_LISTED
    sortable_by = ()
    filter_names: tuple[str, ...] = ()

    def changelist_view(self, request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
        """Return the list, or a page that says why it cannot be read."""
        return self._answer(cast("Any", super()).changelist_view, request, *args, **options)

    def changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
        """Return the page of a row, or one that says why it cannot be read."""
        return self._answer(cast("Any", super()).changeform_view, request, *args, **options)

    def delete_view(self, request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
        """Return the page that refuses a deletion, or one that says why the row cannot be read."""
        return self._answer(cast("Any", super()).delete_view, request, *args, **options)

    def history_view(self, request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
        """Return the history of a row, or a page that says why the row cannot be read."""
        return self._answer(cast("Any", super()).history_view, request, *args, **options)

    def get_object(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        """Return a row, within the time limit."""
        site: Any = super()
        with looking.timed(site.get_queryset(request).db):
            return site.get_object(request, *args, **options)

    def _answer(
        self, view: Callable[..., HttpResponse], request: HttpRequest, *args: Any, **options: Any
    ) -> HttpResponse:
        """Return the answer of a view, or the page of an error of the database that has a fix."""
        try:
            return view(request, *args, **options)
        except Error as error:
            refusal = REFUSALS.get(getattr(error.__cause__, "sqlstate", None) or "")
            if refusal is None:
                raise
            status, reason = refusal
        site: admin.AdminSite = cast("Any", self).admin_site
        context = {**site.each_context(request), "title": "Outbox", "reason": reason}
        return TemplateResponse(request, "outbox_relay/refused.html", context, status=status)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return True for the filters of the list. A condition on any field could keep the server busy."""
        return lookup in self.filter_names

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False."""
        return False


class ShortList(ChangeList):
    """A list of at most ``MOST_LISTED`` rows."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the rows, also those of a list on one page, which Django reads without a limit."""
        with looking.timed(self.queryset.db):
            super().get_results(request)
            self.result_list = self.result_list[: looking.MOST_LISTED]
            len(self.result_list)  # reads them


class NewestEvents(ShortList):
    """The list of events: those with the newest ids, or the one that is searched for."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Return the events."""
        found = super().get_queryset(request, exclude_parameters)
        if self.query:
            return found
        return found.filter(id__gt=looking.newest_id(found.db) - looking.NEWEST_IDS)


@admin.register(LoggedEvent)
class LoggedEventAdmin(ReadOnly, EventAdmin):
    """The newest events of the log. A search finds one event of the whole log by its uid."""

    list_display = ("uid", "type", "key", "created_at", "deliver_at")
    search_fields = ("uid",)
    search_help_text = "uid"
    base_fields = ("uid", "id", "type", "key", "shard", "shown_content_type", "created_at", "deliver_at")
    actions = None

    @admin.display(description="content type")
    def shown_content_type(self, event: LoggedEvent) -> str:
        """Return the content type, of which the log leaves out the usual one."""
        return event.content_type or "application/json"

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:
        """Return the list of the newest events."""
        return NewestEvents

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[LoggedEvent], search_term: str
    ) -> tuple[QuerySet[LoggedEvent], bool]:
        """Return the event with a uid; none if the term is no uid."""
        if not search_term:
            return queryset, False
        try:
            uid = UUID(search_term.strip())
        except ValueError:
            return queryset.none(), False
        number: BigIntegerField[int, int] = BigIntegerField()
        found = Func(Value(uid), function="outbox_internal.event_id", output_field=number)
        return queryset.filter(id=found, uid=uid), False

    def get_fields(self, request: HttpRequest, obj: LoggedEvent | None = None) -> Any:
        """Return the fields, with payload and headers for users who may see them."""
        if _may(request, "view_payload"):
            return (*self.base_fields, "payload", "headers")
        return self.base_fields

    @admin.display(description="payload")
    def payload(self, obj: LoggedEvent) -> str:
        """Return the payload as text."""
        return self._content(obj).payload

    @admin.display(description="headers")
    def headers(self, obj: LoggedEvent) -> str:
        """Return the headers as JSON."""
        return self._content(obj).headers

    def _content(self, obj: LoggedEvent) -> looking.Content:
        return looking.content_of(obj._state.db or router.db_for_read(LoggedEvent), obj.id)


class ReasonForm(ActionForm):
    """The form of an action, with its reason."""

    reason = forms.Field(required=False, label="Reason:", widget=forms.TextInput({"maxlength": REASON_LENGTH}))


class StateFilter(admin.SimpleListFilter):
    """The state of deliveries; those that are dead unless another is chosen."""

    title = "state"
    parameter_name = "state"
    states = ("dead", "waiting", "held", "scheduled")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states that are not the default."""
        return [(state, state) for state in self.states[1:]]

    def choices(self, changelist: Any) -> Any:
        """Yield the choices, of which the first is the default."""
        found = super().choices(changelist)
        yield {**next(found), "display": self.states[0]}
        yield from found

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return all: the list has looked for the state."""
        return queryset


class SinkFilter(admin.SimpleListFilter):
    """The sink of deliveries."""

    title = "sink"
    parameter_name = "sink"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names of the sinks."""
        return [(name, name) for name in looking.sink_names(router.db_for_read(EventDelivery))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return all: the list has looked for the sink."""
        return queryset


class FoundDeliveries(ShortList):
    """The list of deliveries: those that a bounded search finds."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Return the deliveries."""
        found = super().get_queryset(request, exclude_parameters)
        state = self.params.get("state", StateFilter.states[0])
        sink = self.params.get("sink")
        if state not in StateFilter.states or (sink is not None and sink not in looking.sink_names(found.db)):
            return found.none()
        return found.filter(place__in=looking.places(found.db, state, sink))


@admin.register(EventDelivery)
class EventDeliveryAdmin(ReadOnly, DeliveryAdmin):
    """The newest deliveries in a state, and the actions on them."""

    list_display = ("uid", "sink", "type", "key", "state", "attempts", "last_status", "last_error")
    list_filter = (StateFilter, SinkFilter)
    filter_names = ("state", "sink")
    fields = (
        "uid", "sink", "type", "key", "state", "attempts", "last_status", "last_error", "last_attempt_at", "created_at"
    )  # fmt: skip
    actions = ("retry", "discard")
    action_form = ReasonForm

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:
        """Return the list that a bounded search finds."""
        return FoundDeliveries

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return True for users who may retry."""
        return _may(request, "retry_eventdelivery")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return True for users who may discard."""
        return _may(request, "discard_eventdelivery")

    @admin.action(permissions=["retry"], description="Retry the selected deliveries now")
    def retry(self, request: HttpRequest, queryset: QuerySet[EventDelivery]) -> None:
        """Retry the selected deliveries."""
        if (reason := self._reason(request)) is not None:
            alias = router.db_for_write(EventDelivery)
            self._report(request, "retried", acting.retry(alias, _rows(queryset), _actor(request), reason or None))

    @admin.action(permissions=["discard"], description="Discard the selected deliveries, for the reason")
    def discard(self, request: HttpRequest, queryset: QuerySet[EventDelivery]) -> None:
        """Discard the selected deliveries. The reason is required."""
        if (reason := self._reason(request)) is None:
            return
        if not reason:
            self.message_user(request, "Enter a reason: a discard needs one. Nothing was changed.", messages.ERROR)
            return
        alias = router.db_for_write(EventDelivery)
        self._report(request, "discarded", acting.discard(alias, _rows(queryset), _actor(request), reason))

    def _reason(self, request: HttpRequest) -> str | None:
        """Return the reason of the form, or None after a message if it is refused."""
        field = forms.CharField(required=False, max_length=REASON_LENGTH)
        number = request.POST.get("index", "0")
        index = int(number) if number.isascii() and number.isdecimal() and len(number) < 3 else 0
        given = request.POST.getlist("reason")
        try:
            return field.clean(given[index] if index < len(given) else "")
        except forms.ValidationError as error:
            self.message_user(request, f"Reason: {' '.join(error.messages)} Nothing was changed.", messages.ERROR)
            return None

    def _report(self, request: HttpRequest, done: str, outcome: acting.ActionOutcome) -> None:
        left = f"; {outcome.left:,} left, because their state or a relay forbids it" if outcome.left else ""
        if outcome.problem:
            self.message_user(request, f"{outcome.done:,} {done}{left}. {outcome.problem}", messages.ERROR)
        else:
            self.message_user(
                request, f"{outcome.done:,} {done}{left}.", messages.WARNING if left else messages.SUCCESS
            )


def _may(request: HttpRequest, permission: str) -> bool:
    user: Any = request.user
    return user.has_perm(f"{LABEL}.{permission}")


def _rows(queryset: QuerySet[EventDelivery]) -> list[EventDelivery]:
    """Return the selected deliveries, within the time limit."""
    with looking.timed(queryset.db):
        return list(queryset)


def _actor(request: HttpRequest) -> str:
    """Return the user for the audit."""
    return f"{request.user.get_username()}@django"[:255]
