{{/* The objects' name: the release's, with the chart's unless it is in there already. */}}
{{- define "plimsoll.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What picks the operator's pods; immutable in the Deployment. */}}
{{- define "plimsoll.selector" -}}
app.kubernetes.io/name: plimsoll-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object of the chart. */}}
{{- define "plimsoll.labels" -}}
{{ include "plimsoll.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: plimsoll
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "plimsoll.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "plimsoll.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* "true" when the objects of the Prometheus operator are wanted, else empty. */}}
{{- define "plimsoll.monitoring" -}}
{{- $wanted := .Values.monitoring.enabled | toString -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end -}}

{{/* "true" when the operator may make LeaderWorkerSets, else empty. */}}
{{- define "plimsoll.leaderWorkerSet" -}}
{{- $wanted := .Values.leaderWorkerSet.enabled | toString -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1")) -}}
true
{{- end -}}
{{- end -}}

{{/* "true" when the operator may make InferencePools, else empty. */}}
{{- define "plimsoll.inferencePool" -}}
{{- $wanted := .Values.inferencePool.enabled | toString -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") (.Capabilities.APIVersions.Has "inference.networking.k8s.io/v1")) -}}
true
{{- end -}}
{{- end -}}
