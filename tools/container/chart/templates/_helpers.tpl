{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "kvd.selector" -}}
app.kubernetes.io/name: kvd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvd.labels" -}}
{{ include "kvd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvd.config" -}}
[daemon]
socket = /run/kvd/kvd-%i.sock
backend = {{ if .Values.gpu.enabled }}cuda{{ else }}host{{ end }}
pages = {{ if .Values.hugepages.enabled }}huge{{ else }}small{{ end }}
{{- if .Values.gpu.enabled }}
device = 0
{{- end }}
{{- if .Values.file.enabled }}
file_size = {{ .Values.file.size }}
{{- end }}
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ $value }}
{{- end }}
{{- if .Values.domains }}

{{ .Values.domains }}
{{- end }}
{{- end }}

{{- define "kvd.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
